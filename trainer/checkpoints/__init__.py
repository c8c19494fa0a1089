"""Keep a run so that the same command goes on from it, however it ended.

`run_folder` finds and locks the folder and chooses the checkpoint, `state` writes and reads what a run needs, `files`
writes folders whole and sees what is damaged. Nothing outside this package knows how a checkpoint looks.
"""
