"""Tables as text.

Commands, gradwire-bench and papers call it. Tables are made from rows alone, and do not
know who measured or predicted them. Pictures are gradwire-bench's.
"""
