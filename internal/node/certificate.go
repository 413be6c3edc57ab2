package node

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"
)

// certificateCheck is how often the files are looked at.
const certificateCheck = 10 * time.Second

// certificate serves a key pair from files and reads them again when they
// change; a pair that does not load leaves the old one in place.
type certificate struct {
	cert, key string
	log       *slog.Logger

	mu      sync.Mutex
	pair    *tls.Certificate
	checked time.Time
	changed time.Time
}

// newCertificate loads the pair, or fails in one sentence.
func newCertificate(cert, key string, log *slog.Logger) (*certificate, error) {
	c := &certificate{cert: cert, key: key, log: log}
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("--device-tls-cert, --device-tls-key: %w", err)
	}
	c.pair, c.checked, c.changed = &pair, time.Now(), c.newest()
	return c, nil
}

// config is for HTTP/1.1 alone: the firmware knows no HTTP/2, and a WebSocket
// upgrade needs 1.1.
func (c *certificate) config() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return c.current(), nil }}
}

func (c *certificate) newest() (newest time.Time) {
	for _, name := range []string{c.cert, c.key} {
		if info, err := os.Stat(name); err == nil && info.ModTime().After(newest) {
			newest = info.ModTime()
		}
	}
	return newest
}

func (c *certificate) current() *tls.Certificate {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.checked) < certificateCheck {
		return c.pair
	}
	c.checked = time.Now()
	changed := c.newest()
	if changed.Equal(c.changed) {
		return c.pair
	}
	pair, err := tls.LoadX509KeyPair(c.cert, c.key)
	if err != nil {
		c.log.Error("certificate files changed but do not load, keeping the old pair", "error", err)
		return c.pair
	}
	c.pair, c.changed = &pair, changed
	c.log.Info("certificate reloaded", "file", c.cert)
	return c.pair
}
