"""Layouts of token sequences as prefix trees and packs; modules know neither models nor GPUs."""
