"""The examples that Amazon publishes for Signature Version 4."""

import hashlib

from dynamo.kvbm.physical.sigv4 import EMPTY_SHA256, Credentials, signed

EXAMPLE = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
HOST = "examplebucket.s3.amazonaws.com"
STAMP = "20130524T000000Z"


def test_a_get_is_signed_as_in_the_example() -> None:
    headers = signed("GET", "/test.txt", {"Host": HOST, "Range": "bytes=0-9"}, EMPTY_SHA256, EXAMPLE, STAMP)
    assert headers["authorization"] == (
        "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,"
        "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,"
        "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    )


def test_a_put_is_signed_as_in_the_example() -> None:
    given = {
        "Host": HOST,
        "Date": "Fri, 24 May 2013 00:00:00 GMT",
        "x-amz-storage-class": "REDUCED_REDUNDANCY",
    }
    digest = hashlib.sha256(b"Welcome to Amazon S3.").hexdigest()
    headers = signed("PUT", "/test$file.text", given, digest, EXAMPLE, STAMP)
    assert headers["authorization"].endswith("98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd")


def test_who_has_no_key_signs_nothing() -> None:
    assert "authorization" not in signed("GET", "/x", {"host": HOST}, EMPTY_SHA256, Credentials(), STAMP)
