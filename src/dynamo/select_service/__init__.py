"""Worker selection as a separate process, for gateways other than Dynamo's: `python -m dynamo.select_service`.

Contents: its options and its routes. The selection is implemented in `llm.selection`.
"""
