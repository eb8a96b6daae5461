"""Tables, pictures and the HTML report, drawn from traces and rows only.

May import: errors, units, trace. Pictures and HTML need the extra ``gradwire[report]``.
"""
