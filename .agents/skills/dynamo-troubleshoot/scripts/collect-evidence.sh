#!/bin/sh
# Collect the evidence of one Dynamo resource: -k dgd|dgdr|dgdsa|dcd -r NAME [-n NAMESPACE] -o DIR
exec "${PYTHON:-python3}" -m dynamo.ops.troubleshoot.evidence "$@"
