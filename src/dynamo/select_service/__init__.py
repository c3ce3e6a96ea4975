"""Worker selection as a separate process, for gateways other than Dynamo's: `python -m dynamo.select_service`.

`main` holds its options and HTTP API. The selection is implemented in `routing.services`.
"""
