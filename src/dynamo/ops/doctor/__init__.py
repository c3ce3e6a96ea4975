"""Doctor: checks of this machine and its settings; `facts` holds what the collectors see, the checks are pure."""
