"""Tables and pictures, and the page of an algorithm.

Commands, gradwire-bench and papers call it. Tables and pictures are drawn from data and traces
alone, and do not know who measured or predicted them. Pictures need the extra ``gradwire[report]``.
"""
