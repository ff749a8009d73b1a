//! The rules of TLS for a pod: version 1.3, Ed25519, and no peer but one that holds a gateway's private key.

use std::sync::Arc;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{ring, verify_tls13_signature, WebPkiSupportedAlgorithms};
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoServerSessionStorage, ParsedCertificate};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, PeerIncompatible, ServerConfig, SignatureScheme,
};

use super::identity::{public_key_info, Identity};

pub const ACTIVATE: &[u8] = b"atoll-activate/1";
pub const AGENT: &[u8] = b"atoll-agent/1";
pub const EGRESS: &[u8] = b"atoll-egress/1";
/// Bytes that wait to be encrypted or sent, for one connection.
pub const MOST_UNSENT: usize = 256 * 1024;

/// The TLS settings of every connection to this agent.
pub fn config(identity: &Identity, gateways: &[[u8; 32]]) -> Result<Arc<ServerConfig>, String> {
    let failed = |e: Error| format!("TLS: {e}");
    let provider = Arc::new(ring::default_provider());
    let verifier = Gateways {
        keys: gateways.iter().map(|key| public_key_info(key)).collect(),
        algorithms: provider.signature_verification_algorithms,
    };
    let key = ring::sign::any_eddsa_type(&identity.key.clone_key()).map_err(failed)?;
    let certified = CertifiedKey::new(vec![identity.certificate.clone()], key);
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(failed)?
        .with_client_cert_verifier(Arc::new(verifier))
        .with_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from(certified)));
    config.alpn_protocols = [ACTIVATE, AGENT, EGRESS].map(<[u8]>::to_vec).to_vec();
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.max_early_data_size = 0;
    Ok(Arc::new(config))
}

/// Accepts a certificate by its key alone: it must be one of the gateways'.
#[derive(Debug)]
struct Gateways {
    keys: Vec<Vec<u8>>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ClientCertVerifier for Gateways {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let key = ParsedCertificate::try_from(end_entity)?.subject_public_key_info();
        match self.keys.iter().any(|known| known.as_slice() == key.as_ref()) {
            true => Ok(ClientCertVerified::assertion()),
            false => Err(CertificateError::UnknownIssuer.into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(PeerIncompatible::Tls12NotOffered.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }
}
