package client

import (
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/eclipse/paho.mqtt.golang/packets"
)

// Raw is a connection on which a test sends what no firmware sends.
type Raw struct {
	net.Conn
	t testing.TB
}

// DialRaw connects, until the test ends.
func DialRaw(t testing.TB, address string) Raw {
	t.Helper()
	return DialRawFrom(t, address, nil)
}

// DialRawFrom is DialRaw from an address of this machine; nil: any.
func DialRawFrom(t testing.TB, address string, from net.IP) Raw {
	t.Helper()
	d := net.Dialer{}
	if from != nil {
		d.LocalAddr = &net.TCPAddr{IP: from}
	}
	c, err := d.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return Raw{c, t}
}

// Send sends bytes.
func (r Raw) Send(what []byte) {
	r.t.Helper()
	if _, err := r.Write(what); err != nil {
		r.t.Fatal(err)
	}
}

// Ended reads until the server closes, and returns what it sent and how long that
// took. It is an error if the server does not close within the limit.
func (r Raw) Ended(limit time.Duration) (sent []byte, took time.Duration) {
	r.t.Helper()
	begun := time.Now()
	_ = r.SetReadDeadline(begun.Add(limit))
	sent, err := io.ReadAll(r)
	if network, ok := errors.AsType[net.Error](err); ok && network.Timeout() {
		r.t.Errorf("the connection was still open after %v; received %x", limit, sent)
	}
	return sent, time.Since(begun)
}

// Packet waits for one MQTT packet.
func (r Raw) Packet() packets.ControlPacket {
	r.t.Helper()
	_ = r.SetReadDeadline(time.Now().Add(10 * time.Second))
	p, err := packets.ReadPacket(r)
	if err != nil {
		r.t.Fatal(err)
	}
	return p
}
