"""``bench storm``: ways to train under one schedule of kills, stops and partitions."""
