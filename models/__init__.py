"""How the demo model in `models/kvtier-demo` is made and measured."""
