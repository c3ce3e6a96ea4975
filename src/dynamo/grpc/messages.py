"""Messages: the wire types of KServe's open inference protocol, version 2, and of Triton's model configuration.

The table lists the names, numbers and types of the fields in the public specification.
"""

from typing import Any

from dynamo.grpc.message_tables import classes_of, file_of

PACKAGE = "inference"
SERVICE = f"{PACKAGE}.GRPCInferenceService"

TABLE: dict[str, str] = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "1 live bool",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "1 ready bool",
    "ModelReadyRequest": "1 name string, 2 version string",
    "ModelReadyResponse": "1 ready bool",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "1 name string, 2 version string, 3 extensions string*",
    "ModelMetadataRequest": "1 name string, 2 version string",
    "ModelMetadataResponse.TensorMetadata": "1 name string, 2 datatype string, 3 shape int64*",
    "ModelMetadataResponse": (
        "1 name string, 2 versions string*, 3 platform string,"
        " 4 inputs ModelMetadataResponse.TensorMetadata*, 5 outputs ModelMetadataResponse.TensorMetadata*"
    ),
    "InferParameter": (
        "1 bool_param bool|parameter_choice, 2 int64_param int64|parameter_choice,"
        " 3 string_param string|parameter_choice, 4 double_param double|parameter_choice,"
        " 5 uint64_param uint64|parameter_choice"
    ),
    "InferTensorContents": (
        "1 bool_contents bool*, 2 int_contents int32*, 3 int64_contents int64*, 4 uint_contents uint32*,"
        " 5 uint64_contents uint64*, 6 fp32_contents float*, 7 fp64_contents double*, 8 bytes_contents bytes*"
    ),
    "ModelInferRequest.InferInputTensor": (
        "1 name string, 2 datatype string, 3 shape int64*, 4 parameters InferParameter%, 5 contents InferTensorContents"
    ),
    "ModelInferRequest.InferRequestedOutputTensor": "1 name string, 2 parameters InferParameter%",
    "ModelInferRequest": (
        "1 model_name string, 2 model_version string, 3 id string, 4 parameters InferParameter%,"
        " 5 inputs ModelInferRequest.InferInputTensor*, 6 outputs ModelInferRequest.InferRequestedOutputTensor*,"
        " 7 raw_input_contents bytes*"
    ),
    "ModelInferResponse.InferOutputTensor": (
        "1 name string, 2 datatype string, 3 shape int64*, 4 parameters InferParameter%, 5 contents InferTensorContents"
    ),
    "ModelInferResponse": (
        "1 model_name string, 2 model_version string, 3 id string, 4 parameters InferParameter%,"
        " 5 outputs ModelInferResponse.InferOutputTensor*, 6 raw_output_contents bytes*"
    ),
    "ModelStreamInferResponse": "1 error_message string, 2 infer_response ModelInferResponse",
    "ModelConfigRequest": "1 name string, 2 version string",
    "ModelInput": "1 name string, 2 data_type enum, 4 dims int64*, 8 optional bool",
    "ModelOutput": "1 name string, 2 data_type enum, 3 dims int64*",
    "ModelTransactionPolicy": "1 decoupled bool",
    "ModelConfig": (
        "1 name string, 2 platform string, 4 max_batch_size int32, 5 input ModelInput*, 6 output ModelOutput*,"
        " 17 backend string, 19 model_transaction_policy ModelTransactionPolicy"
    ),
    "ModelConfigResponse": "1 config ModelConfig",
}
"""Fields of each message, as in `message_tables`.

An enumeration is a number, as on the wire. A model's configuration has only the fields that are filled; other fields of
a serialized configuration are ignored.
"""

DATA_TYPES = (
    "INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64",
    "BYTES", "BF16",
)  # fmt: skip
"""Enumeration of data types in a model's configuration, by the names of tensors' types (BYTES is a string there)."""

CLASSES: dict[str, Any] = classes_of(file_of("kserve_v2.proto", PACKAGE, TABLE))
"""All messages by name."""
