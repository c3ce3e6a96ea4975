"""Messages: the wire types of Envoy's external processing (`ext_proc`, v3).

The table lists the names, numbers and types of the fields in the public definitions; all types are in one package here,
because the wire format does not contain their packages.
"""

from typing import Any

from dynamo.grpc.message_tables import classes_of, file_of

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"

TABLE: dict[str, str] = {
    "Struct": "1 fields Value%",
    "ListValue": "1 values Value*",
    "Value": (
        "1 null_value enum|kind, 2 number_value double|kind, 3 string_value string|kind, 4 bool_value bool|kind,"
        " 5 struct_value Struct|kind, 6 list_value ListValue|kind"
    ),
    "Metadata": "1 filter_metadata Struct%",
    "HeaderValue": "1 key string, 2 value string, 3 raw_value bytes",
    "HeaderMap": "1 headers HeaderValue*",
    "HeaderValueOption": "1 header HeaderValue, 3 append_action enum",
    "HttpHeaders": "1 headers HeaderMap, 3 end_of_stream bool",
    "HttpBody": "1 body bytes, 2 end_of_stream bool",
    "HttpTrailers": "1 trailers HeaderMap",
    "ProtocolConfiguration": "1 request_body_mode enum, 2 response_body_mode enum",
    "ProcessingRequest": (
        "2 request_headers HttpHeaders|request, 3 response_headers HttpHeaders|request, 4 request_body HttpBody|request,"
        " 5 response_body HttpBody|request, 6 request_trailers HttpTrailers|request,"
        " 7 response_trailers HttpTrailers|request, 8 metadata_context Metadata, 10 observability_mode bool,"
        " 11 protocol_config ProtocolConfiguration"
    ),
    "HeaderMutation": "1 set_headers HeaderValueOption*, 2 remove_headers string*",
    "StreamedBodyResponse": "1 body bytes, 2 end_of_stream bool",
    "BodyMutation": "3 streamed_response StreamedBodyResponse|mutation",
    "CommonResponse": (
        "1 status enum, 2 header_mutation HeaderMutation, 3 body_mutation BodyMutation, 5 clear_route_cache bool"
    ),
    "HeadersResponse": "1 response CommonResponse",
    "BodyResponse": "1 response CommonResponse",
    "TrailersResponse": "1 header_mutation HeaderMutation",
    "HttpStatus": "1 code enum",
    "ImmediateResponse": "1 status HttpStatus, 2 headers HeaderMutation, 3 body bytes, 5 details string",
    "ProcessingResponse": (
        "1 request_headers HeadersResponse|response, 2 response_headers HeadersResponse|response,"
        " 3 request_body BodyResponse|response, 4 response_body BodyResponse|response,"
        " 5 request_trailers TrailersResponse|response, 6 response_trailers TrailersResponse|response,"
        " 7 immediate_response ImmediateResponse|response, 8 dynamic_metadata Struct"
    ),
}

CLASSES: dict[str, Any] = classes_of(file_of("dynamo_ext_proc.proto", "dynamo.ext_proc", TABLE))

NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX_STREAMED = range(5)
"""`ProcessingMode.BodySendMode`: how the gateway sends a body."""
BODY_MODES = ("NONE", "STREAMED", "BUFFERED", "BUFFERED_PARTIAL", "FULL_DUPLEX_STREAMED", "GRPC")
OVERWRITE_IF_EXISTS_OR_ADD = 2
"""`HeaderValueOption.HeaderAppendAction`."""
