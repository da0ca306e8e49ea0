"""`kvtier check`: what recorded sessions lose on a server's settings, turn by turn.

command.py   the command: transcripts in, figures, page and exit code out
engines.py   the sessions on two real engines, one of which keeps everything
figures.py   what was measured, and what it comes to
page.py      the same as a page with pictures
"""
