package webhooks

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"syscall"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/egress"
)

// Limits of one delivery.
const (
	maxAnswer = 64 << 10 // bytes that are read
	maxError  = 300      // bytes of the text that is kept
	idleConns = 30 * time.Second
)

var sendTimeout = 10 * time.Second

// kindTest is the type of a delivery that somebody requests to try a webhook.
const kindTest devices.EventKind = "test"

// message is the body of a delivery.
type message struct {
	Type      devices.EventKind `json:"type"`
	Timestamp time.Time         `json:"timestamp"` // of the delivery
	Webhook   string            `json:"webhook"`
	// Gap is there if events before this one were deleted before they could be delivered.
	Gap  json.RawMessage `json:"gap,omitempty"`
	Data json.RawMessage `json:"data"`
}

// sender makes deliveries. It is safe for concurrent use.
type sender struct {
	client *http.Client
	agent  string
}

func newSender(allow *egress.Allow, version string) *sender {
	return &sender{agent: "fleetd/" + version, client: &http.Client{Timeout: sendTimeout,
		// No proxy: the address that is dialled would be that of the proxy.
		Transport:     &http.Transport{DialContext: allow.Dialer(sendTimeout), TLSHandshakeTimeout: sendTimeout, MaxIdleConns: MaxHooks * maxFlight, MaxIdleConnsPerHost: maxFlight, IdleConnTimeout: idleConns, MaxResponseHeaderBytes: maxAnswer},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}}
}

// messageID returns the id of a delivery, the same whenever and by whichever node it is made: a receiver ignores those that
// it has.
func messageID(hook string, kind devices.EventKind, data []byte) string {
	h := sha256.New()
	fmt.Fprintf(h, "%s\n%s\n", hook, kind)
	h.Write(data)
	return "msg_" + hex.EncodeToString(h.Sum(nil)[:16])
}

// sign returns the signature of Standard Webhooks.
func sign(key []byte, id, timestamp string, body []byte) string {
	h := hmac.New(sha256.New, key)
	fmt.Fprintf(h, "%s.%s.", id, timestamp)
	h.Write(body)
	return "v1," + base64.StdEncoding.EncodeToString(h.Sum(nil))
}

// send makes one delivery. status is 0 without an answer. The error is for people who may read the webhook; it contains
// nothing of the answer but its status.
func (s *sender) send(ctx context.Context, to string, key []byte, id string, m message) (status int, err error) {
	body, err := json.Marshal(m)
	if err != nil {
		return 0, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, to, bytes.NewReader(body))
	if err != nil {
		return 0, errors.New("the URL is not valid")
	}
	timestamp := strconv.FormatInt(m.Timestamp.Unix(), 10)
	req.Header = http.Header{"Content-Type": {"application/json"}, "User-Agent": {s.agent},
		"webhook-id": {id}, "webhook-timestamp": {timestamp}, "webhook-signature": {sign(key, id, timestamp, body)}}
	resp, err := s.client.Do(req)
	if err != nil {
		if of, ok := errors.AsType[*url.Error](err); ok {
			if of.Timeout() {
				return 0, fmt.Errorf("no answer within %s", sendTimeout)
			}
			err = of.Err // without the URL, which may contain a token
		}
		return 0, errors.New(devices.Cut(inWords(err), maxError))
	}
	defer resp.Body.Close()
	_, readErr := io.Copy(io.Discard, io.LimitReader(resp.Body, maxAnswer)) // so that the connection can be used again
	switch {
	case resp.StatusCode >= 300 && resp.StatusCode < 400:
		return resp.StatusCode, fmt.Errorf("the receiver answered %d: redirects are not followed; set the URL that it names", resp.StatusCode)
	case resp.StatusCode < 200 || resp.StatusCode >= 300:
		return resp.StatusCode, fmt.Errorf("the receiver answered %d", resp.StatusCode)
	case readErr != nil:
		return resp.StatusCode, errors.New("the receiver's answer was cut off")
	}
	return resp.StatusCode, nil
}

// inWords returns why a request got no answer, for people.
func inWords(err error) string {
	var name *net.DNSError
	var certificate *tls.CertificateVerificationError
	var network net.Error // also *net.OpError and *net.DNSError, which quote nothing of what was received
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return "connection refused: nothing listens on the port of the URL"
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET):
		return "the receiver closed the connection without an answer"
	case errors.Is(err, http.ErrSchemeMismatch):
		return "the receiver does not speak HTTPS on this port; set a URL with http:// or another port"
	case errors.As(err, &certificate):
		return "its certificate is not accepted: " + certificate.Err.Error()
	case errors.As(err, &name) && name.IsNotFound:
		return fmt.Sprintf("the name %q has no address", name.Name)
	case errors.As(err, &network):
		return err.Error()
	}
	return "the answer is not HTTP; check the scheme and the port of the URL"
}

func (s *sender) close() { s.client.CloseIdleConnections() }
