#!/bin/sh
# Train until the training is done: exit code 75 means that it was stopped early with a checkpoint.
code=75
while [ $code -eq 75 ]; do
    train fit waves "$@"
    code=$?
done
exit $code
