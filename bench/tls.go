package main

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"os"
	"path/filepath"

	"fleetd/bench/load"
)

// anyServer is how devices of this program speak TLS. They share the processors with the server, so they do no more than
// they must: no chain is verified, and the key exchange is the plain one that a chip offers, not the hybrid one of Go.
var anyServer = &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13, CurvePreferences: []tls.CurveID{tls.X25519}, DynamicRecordSizingDisabled: true}

// maxRecord is the longest TLS record of a device, in bytes (CONFIG_MBEDTLS_SSL_OUT_CONTENT_LEN of the firmware).
const maxRecord = 4096

// records is a TLS connection that writes records as a device does. Of itself crypto/tls begins with short ones.
type records struct{ *tls.Conn }

// Write writes records of maxRecord bytes, and one for the rest.
func (c records) Write(b []byte) (n int, err error) {
	for err == nil && n < len(b) {
		var some int
		some, err = c.Conn.Write(b[n:min(n+maxRecord, len(b))])
		n += some
	}
	return n, err
}

// selfSigned leaves a certificate of this machine and its key in dir.
func selfSigned(dir string) (certificate, key string, err error) {
	pair, err := load.SelfSigned()
	if err != nil {
		return "", "", err
	}
	secret, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	if err != nil {
		return "", "", err
	}
	certificate, key = filepath.Join(dir, "certificate.pem"), filepath.Join(dir, "key.pem")
	return certificate, key, errors.Join(
		os.WriteFile(certificate, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: pair.Certificate[0]}), 0o600),
		os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}), 0o600))
}
