package node

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/counters"
)

// certificateCheck is how often the files are checked.
const certificateCheck = 10 * time.Second

// certificate serves a key pair from files to TLS listeners.
type certificate struct {
	reloadable
	cert, key string
	log       *slog.Logger
	pair      atomic.Pointer[tls.Certificate]
}

// newCertificate loads the pair of two flags.
func (n *node) newCertificate(flags, cert, key string) (*certificate, error) {
	c := &certificate{cert: cert, key: key, log: n.log}
	c.begin(c.load, certificateCheck, cert, key)
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", flags, err)
	}
	c.use(&pair)
	n.reloadables = append(n.reloadables, &c.reloadable)
	return c, nil
}

// config allows only HTTP/1.1: the firmware does not support HTTP/2, and WebSocket upgrades
// and the deadlines and limits of connections need 1.1.
func (c *certificate) config() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return c.pair.Load(), nil }}
}

// mqttConfig is config for MQTT, which clients may select by ALPN.
func (c *certificate) mqttConfig() *tls.Config {
	config := c.config()
	config.NextProtos = []string{"mqtt"}
	return config
}

func (c *certificate) load() error {
	pair, err := tls.LoadX509KeyPair(c.cert, c.key)
	if err != nil {
		c.log.Error("cannot load the changed certificate files; keeping the previous pair", "error", err, "expires", c.expires())
		return err
	}
	c.use(&pair)
	c.log.Info("certificate reloaded", "file", c.cert, "expires", pair.Leaf.NotAfter)
	return nil
}

// use makes a pair the one that is served.
func (c *certificate) use(pair *tls.Certificate) {
	c.pair.Store(pair)
	if !pair.Leaf.NotAfter.After(clock.Now()) {
		c.log.Warn("the certificate has expired and clients refuse it; renew it", "file", c.cert, "expired", pair.Leaf.NotAfter)
	}
}

// expires returns when the served pair expires.
func (c *certificate) expires() time.Time { return c.pair.Load().Leaf.NotAfter }

// metrics adds the metrics of the certificate of a listener, "device" or "api".
func (c *certificate) metrics(r *counters.Registry, listener string) {
	counters.Value(r.Gauge("certificate_expiry_timestamp_seconds", "When the served certificate expires, in seconds since 1970, by listener: `device`, `api`; absent without TLS.", "listener"),
		func() int64 { return c.expires().Unix() }, listener)
	reloads := r.Counter("certificate_reloads_total", "Changed certificate files: `loaded`, `failed`.", "result", "listener")
	counters.Value(reloads, c.reloads.Load, "loaded", listener)
	counters.Value(reloads, c.failures.Load, "failed", listener)
}
