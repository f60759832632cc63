"""The side of a program that submits requests and reads their tokens."""
