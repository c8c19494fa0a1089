"""Judge estimators against planted truths, against each other, and by their cost."""
