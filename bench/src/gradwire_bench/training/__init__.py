"""``gradwire bench train``: losses over steps and over seconds, ours beside peers."""
