package node

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// certificateCheck is how often the files are looked at.
const certificateCheck = 10 * time.Second

// certificate serves a key pair from files, to every TLS listener of devices,
// and reads them again when they change; a pair that does not load leaves the
// old one in place. It is safe for concurrent use.
type certificate struct {
	cert, key string
	log       *slog.Logger

	mu      sync.Mutex
	pair    *tls.Certificate
	checked time.Time
	seen    stamp // of the files as last tried, whether they loaded or not

	reloads, failures atomic.Uint64
}

// stamp tells a change of the two files. Renewals may keep the times of older
// files, so a later time alone is not what counts.
type stamp [2]struct {
	changed time.Time
	size    int64
}

// newCertificate loads the pair of two flags, or fails in one sentence.
func newCertificate(flags, cert, key string, log *slog.Logger) (*certificate, error) {
	c := &certificate{cert: cert, key: key, log: log, checked: time.Now()}
	c.seen = c.stamp()
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", flags, err)
	}
	c.take(&pair)
	return c, nil
}

// config is for HTTP/1.1 alone: the firmware knows no HTTP/2, a WebSocket upgrade
// needs 1.1, and so do the deadlines and limits of connections.
func (c *certificate) config() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return c.current(), nil }}
}

// mqttConfig is config for MQTT, which clients may name by ALPN.
func (c *certificate) mqttConfig() *tls.Config {
	config := c.config()
	config.NextProtos = []string{"mqtt"}
	return config
}

func (c *certificate) stamp() (s stamp) {
	for i, name := range []string{c.cert, c.key} {
		if info, err := os.Stat(name); err == nil {
			s[i].changed, s[i].size = info.ModTime(), info.Size()
		}
	}
	return s
}

// current is the pair to serve. It looks at the files at most once in
// certificateCheck.
func (c *certificate) current() *tls.Certificate {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.checked) >= certificateCheck {
		c.checkLocked()
	}
	return c.pair
}

// checkLocked reads the files if they changed since they were last tried, so
// that a pair which does not load is complained of once. The stamp is taken
// first: what is written while they are read shows as another change.
func (c *certificate) checkLocked() {
	c.checked = time.Now()
	now := c.stamp()
	if now == c.seen {
		return
	}
	c.seen = now
	c.loadLocked()
}

func (c *certificate) loadLocked() {
	pair, err := tls.LoadX509KeyPair(c.cert, c.key)
	if err != nil {
		c.failures.Add(1)
		c.log.Error("certificate files changed but do not load, keeping the old pair", "error", err, "expires", c.pair.Leaf.NotAfter)
		return
	}
	c.reloads.Add(1)
	c.take(&pair)
	c.log.Info("certificate reloaded", "file", c.cert, "expires", pair.Leaf.NotAfter)
}

// take serves a pair from now on.
func (c *certificate) take(pair *tls.Certificate) {
	c.pair = pair
	if !pair.Leaf.NotAfter.After(time.Now()) {
		c.log.Warn("the certificate has expired, so that clients refuse it; renew it", "file", c.cert, "expired", pair.Leaf.NotAfter)
	}
}

// reload reads the files now, changed or not.
func (c *certificate) reload() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.checked, c.seen = time.Now(), c.stamp()
	c.loadLocked()
}

// expires is when the pair that is served does.
func (c *certificate) expires() time.Time { return c.current().Leaf.NotAfter }
