package node

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/counters"
)

// certificateCheck is how often the files are checked.
const certificateCheck = 10 * time.Second

// certificate serves a key pair from files to TLS listeners, and reads the files again when
// they change; if they cannot be loaded, it keeps the previous pair. It is safe for
// concurrent use.
type certificate struct {
	cert, key string
	log       *slog.Logger

	mu        sync.Mutex
	pair      *tls.Certificate
	checked   time.Time
	lastStamp stamp // of the files at the last attempt, successful or not

	reloads, failures atomic.Uint64
}

// stamp identifies a version of the two files. A renewal may set an older time, so any
// difference counts as a change.
type stamp [2]struct {
	changed time.Time
	size    int64
}

// newCertificate loads the pair of two flags.
func newCertificate(flags, cert, key string, log *slog.Logger) (*certificate, error) {
	c := &certificate{cert: cert, key: key, log: log, checked: time.Now()}
	c.lastStamp = c.stamp()
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", flags, err)
	}
	c.use(&pair)
	return c, nil
}

// config allows only HTTP/1.1: the firmware does not support HTTP/2, and WebSocket upgrades
// and the deadlines and limits of connections need 1.1.
func (c *certificate) config() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return c.currentPair(), nil }}
}

// mqttConfig is config for MQTT, which clients may select by ALPN.
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

// currentPair returns the pair to serve. It checks the files at most once per certificateCheck.
func (c *certificate) currentPair() *tls.Certificate {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.checked) >= certificateCheck {
		c.checkLocked()
	}
	return c.pair
}

// checkLocked reads the files if they have changed since the last attempt, so that an invalid
// pair is logged once. The stamp is taken first: a write during the reading is then detected
// as another change.
func (c *certificate) checkLocked() {
	c.checked = time.Now()
	now := c.stamp()
	if now == c.lastStamp {
		return
	}
	c.lastStamp = now
	c.loadLocked()
}

func (c *certificate) loadLocked() {
	pair, err := tls.LoadX509KeyPair(c.cert, c.key)
	if err != nil {
		c.failures.Add(1)
		c.log.Error("cannot load the changed certificate files; keeping the previous pair", "error", err, "expires", c.pair.Leaf.NotAfter)
		return
	}
	c.reloads.Add(1)
	c.use(&pair)
	c.log.Info("certificate reloaded", "file", c.cert, "expires", pair.Leaf.NotAfter)
}

// use makes a pair the one that is served.
func (c *certificate) use(pair *tls.Certificate) {
	c.pair = pair
	if !pair.Leaf.NotAfter.After(clock.Now()) {
		c.log.Warn("the certificate has expired and clients refuse it; renew it", "file", c.cert, "expired", pair.Leaf.NotAfter)
	}
}

// reload reads the files now, even if they have not changed.
func (c *certificate) reload() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.checked, c.lastStamp = time.Now(), c.stamp()
	c.loadLocked()
}

// expires returns when the served pair expires.
func (c *certificate) expires() time.Time { return c.currentPair().Leaf.NotAfter }

// metrics adds the metrics of the certificate of a listener, "device" or "api".
func (c *certificate) metrics(r *counters.Registry, listener string) {
	counters.Value(r.Gauge("certificate_expiry_timestamp_seconds", "When the served certificate expires, in seconds since 1970, by listener: `device`, `api`; absent without TLS.", "listener"),
		func() int64 { return c.expires().Unix() }, listener)
	reloads := r.Counter("certificate_reloads_total", "Changed certificate files: `loaded`, `failed`.", "result", "listener")
	counters.Value(reloads, c.reloads.Load, "loaded", listener)
	counters.Value(reloads, c.failures.Load, "failed", listener)
}
