"""Other engines, each in a Python of its own behind protocol.py, and ratio.py, which runs one
beside nva."""
