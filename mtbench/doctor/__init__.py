"""`mtbench doctor`: can figures that are measured on this machine be trusted?

A check is one entry of `checks.CHECKS`: a function that measures, and below it a pure one that judges the
figures. machine.py has the checks of every machine, gpu.py those of a GPU.
"""
