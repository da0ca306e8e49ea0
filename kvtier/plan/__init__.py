"""`kvtier plan`: a fleet of engines simulated under traffic, before anything is bought.

hardware.py    rates and budgets from stated figures of accelerators and models
calibration.py rates from a replay of the real engine
fleet.py       what is simulated: rates, caches, schedulers, routing
hints.py       what agents could say of their sessions
simulate.py    traffic through a fleet (core/ is the compiled loop)
answers.py     hit rates, percentiles, residents, cost
search.py      the fewest replicas that meet an SLO
options.py, cli.py, table.py, page.py   the command and what people see
"""
