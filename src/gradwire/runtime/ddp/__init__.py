"""DDP: its communication hook, and its own reducer where that is as good.

``attach`` loads the room for a DDP model. It knows the step, and nothing of other
wrappers.
"""
