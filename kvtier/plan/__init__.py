"""The planner, `kvtier plan`: a fleet of engines simulated under traffic, before one is bought.

hardware.py    rates and budgets from stated figures of accelerators and models
calibration.py rates from a replay of the real engine
fleet.py       the fleet that is simulated: rates, caches, schedulers, routing
hints.py       hints that agents could give of their sessions
simulate.py    traffic through a fleet (core/ is the compiled loop)
answers.py     hit rates, percentiles, residents, cost
study.py       one question, from options to the fewest replicas that meet an SLO
cli.py, table.py, page.py   the command and what people see
"""
