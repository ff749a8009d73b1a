//! The agent's identity: a key pair that is made when it starts and never leaves its memory, and a certificate for it.

use std::fmt::Write;

use ring::digest::{digest, SHA256};
use ring::rand::SystemRandom;
use ring::signature::{Ed25519KeyPair, KeyPair};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};

const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const ED25519: &[u8] = &[0x06, 0x03, 0x2b, 0x65, 0x70];
const COMMON_NAME: &[u8] = &[0x06, 0x03, 0x55, 0x04, 0x03];
const NAME: &[u8] = b"atoll-agent";

pub struct Identity {
    pub certificate: CertificateDer<'static>,
    pub key: PrivatePkcs8KeyDer<'static>,
    /// SHA-256 of the certificate, in hexadecimal digits.
    pub fingerprint: String,
}

impl Identity {
    /// Makes a new key pair and signs a certificate with it.
    pub fn make() -> Result<Self, String> {
        let failed = |_| "no key could be made".to_owned();
        let secret = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).map_err(failed)?;
        let pair = Ed25519KeyPair::from_pkcs8(secret.as_ref()).map_err(|_| "no key could be made")?;
        let certificate = sign_certificate(&pair);
        let fingerprint = hex(digest(&SHA256, &certificate).as_ref());
        let key = PrivatePkcs8KeyDer::from(secret.as_ref().to_vec());
        Ok(Self { certificate: certificate.into(), key, fingerprint })
    }
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The SubjectPublicKeyInfo of an Ed25519 key.
pub fn public_key_info(key: &[u8]) -> Vec<u8> {
    tlv(SEQUENCE, &[&tlv(SEQUENCE, &[ED25519]), &tlv(0x03, &[&[0], key])])
}

/// A certificate that says nothing but the key. Nobody looks at its names and dates: it is known by its hash.
fn sign_certificate(pair: &Ed25519KeyPair) -> Vec<u8> {
    let algorithm = tlv(SEQUENCE, &[ED25519]);
    let name = tlv(SEQUENCE, &[&tlv(SET, &[&tlv(SEQUENCE, &[COMMON_NAME, &tlv(0x0c, &[NAME])])])]);
    let dates = tlv(SEQUENCE, &[&tlv(0x17, &[b"700101000000Z"]), &tlv(0x18, &[b"99991231235959Z"])]);
    let version = tlv(0xa0, &[&tlv(0x02, &[&[2]])]);
    let serial = tlv(0x02, &[&[1]]);
    let key = public_key_info(pair.public_key().as_ref());
    let body = tlv(SEQUENCE, &[&version, &serial, &algorithm, &name, &dates, &name, &key]);
    let signature = pair.sign(&body);
    tlv(SEQUENCE, &[&body, &algorithm, &tlv(0x03, &[&[0], signature.as_ref()])])
}

/// One value in DER: tag, length, content.
fn tlv(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    let content = parts.concat();
    let mut out = vec![tag];
    match content.len() {
        short @ 0..=127 => out.push(short as u8),
        long @ 128..=255 => out.extend_from_slice(&[0x81, long as u8]),
        longer => {
            out.push(0x82);
            out.extend_from_slice(&(longer as u16).to_be_bytes());
        }
    }
    out.extend_from_slice(&content);
    out
}

/// The 32 bytes of a public key in Base64; `None` for anything else.
pub fn decode_key(text: &str) -> Option<[u8; 32]> {
    let digits = text.strip_suffix('=')?.bytes();
    let mut bits = 0u32;
    let mut held = 0;
    let mut out = Vec::new();
    for digit in digits {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        held += 6;
        if held >= 8 {
            held -= 8;
            out.push((bits >> held) as u8);
            bits &= (1 << held) - 1;
        }
    }
    out.try_into().ok()
}
