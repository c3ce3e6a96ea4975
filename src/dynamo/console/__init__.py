"""Console: web pages about the state of a running frontend, and the data behind them and behind `dynamo top`.

It reads what the other packages keep: metrics, requests, routing decisions, workers, planners. It adds nothing to the path of a token, samples
only while someone watches, and changes nothing except by the actions of an admin. The pages are static files that load nothing from elsewhere.
"""
