"""continuous"""
