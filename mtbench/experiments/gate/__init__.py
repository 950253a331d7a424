"""The gate: does one build of mtbench decode slower than another, or emit other tokens?"""
