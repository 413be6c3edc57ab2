//go:build hosttest

package node

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/http"
	"os"
)

// The program of `make hosts` fetches all documents from one server of the test, whatever host their address has: hosts have a fixed
// client_id. HOSTTEST_DOCUMENTS is its address, HOSTTEST_ROOTS the file with its certificate.
func init() {
	roots := x509.NewCertPool()
	if pem, err := os.ReadFile(os.Getenv("HOSTTEST_ROOTS")); err != nil || !roots.AppendCertsFromPEM(pem) {
		return
	}
	documentClient = &http.Client{
		Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, os.Getenv("HOSTTEST_DOCUMENTS"))
		}},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}
