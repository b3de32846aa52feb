"""The part of a daemon that does not depend on its role: the life of a node, its rank processes, and operators' interfaces."""
