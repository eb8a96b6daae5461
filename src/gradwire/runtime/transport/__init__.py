"""Transport: verbs as calls of torch.distributed, and a graph of tasks.

``wire`` opens process groups and carries one verb out. ``task_graph`` runs tasks whose
dependencies have ended. ``checksums`` seals payloads. It knows neither messages nor
lost ranks.
"""
