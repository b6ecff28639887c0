"""Measuring Ignis against other engines: model files, alternating runs, table, JSON and chart.

    python -m bench.compare --peer-python PATH      see `bench/README.md`
"""
