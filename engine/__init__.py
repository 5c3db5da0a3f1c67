"""The engine: models, drafters, the speculative loop and the process that hosts them.

Never imports textual. The terminal program reaches it through `protocol` and `client` only.
"""
