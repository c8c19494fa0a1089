"""What credit finds: estimators judged against planted truths, against each other, and by what they cost."""
