"""The tool loop as a graph of LangGraph.

    python examples/agent_langgraph.py --url http://127.0.0.1:30000

The server's command is in docs/agents.md. Exits with 1 when a tool call fails.
"""

from __future__ import annotations

import sys

import vault
from langchain_core.messages import AIMessage, AnyMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


def agent(url: str, story: vault.Story) -> None:
    """Model and tools take turns until a vault is empty, or until the model calls no tool."""
    tool = StructuredTool.from_function(
        story.vaults.open, name=vault.TOOL, description=vault.DESCRIPTION
    )
    model = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        model=vault.MODEL,
        temperature=0,
        max_tokens=vault.MAX_ANSWER_TOKENS,
    ).bind_tools([tool])

    def call_model(state: MessagesState) -> dict[str, list[AIMessage]]:
        return {"messages": [model.invoke(state["messages"])]}

    def go_on(state: MessagesState) -> str:
        return END if state["messages"][-1].content == vault.EMPTY else "model"

    graph = StateGraph(MessagesState)
    graph.add_node("model", call_model)
    graph.add_node("tools", ToolNode([tool]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_conditional_edges("tools", go_on)
    question = story.questions[0]
    vault.show("user", question)
    asked = {"messages": [("system", story.manual), ("user", question)]}
    for update in graph.compile().stream(asked, stream_mode="updates"):
        for node, state in update.items():
            show(node, state["messages"][-1])


def show(node: str, message: AnyMessage) -> None:
    """Show the words of a node of the graph as a line of the transcript."""
    calls = message.tool_calls if isinstance(message, AIMessage) else []
    for call in calls:
        vault.show_call(call["args"])
    if not calls:
        vault.show("tool" if node == "tools" else "assistant", message.text)


if __name__ == "__main__":
    sys.exit(vault.run(agent, __doc__ or ""))
