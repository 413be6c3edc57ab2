package apiclient

import (
	"bytes"
	"crypto/tls"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"os"
)

// pinned trusts the first certificate of a file and no other: the node's own,
// whatever its names and its issuer.
func pinned(file string) http.RoundTripper {
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12, InsecureSkipVerify: true, // VerifyConnection is stricter
		VerifyConnection: func(state tls.ConnectionState) error {
			text, err := os.ReadFile(file)
			if err != nil {
				return fmt.Errorf("the certificate of the API cannot be compared: %w; give --api with a name that it has", err)
			}
			block, _ := pem.Decode(text)
			if block == nil || len(state.PeerCertificates) == 0 || !bytes.Equal(block.Bytes, state.PeerCertificates[0].Raw) {
				return errors.New("the API shows another certificate than " + file + " contains; if that was renewed a moment ago, try again")
			}
			return nil
		}}
	return transport
}
