package devicetest

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Broker returns the address, host:port, of a real MQTT broker such as
// Mosquitto, and reserves it for the test: a client that subscribes there for devices receives
// the messages of all tests, so no other test on this machine may use it meanwhile. Without a
// broker the test is skipped.
func Broker(t testing.TB) (address string) {
	t.Helper()
	address = strings.TrimPrefix(os.Getenv("FLEETD_TEST_MQTT"), "tcp://")
	if address == "" {
		address = "127.0.0.1:1883"
	}
	c, err := net.DialTimeout("tcp", address, time.Second)
	if err != nil {
		t.Skipf("NOT RUN: no MQTT broker at %s (FLEETD_TEST_MQTT): %v", address, err)
	}
	_ = c.Close()
	lock, err := os.OpenFile(filepath.Join(os.TempDir(), fmt.Sprintf("fleetd-test-broker-%s-%d.lock", strings.ReplaceAll(address, ":", "-"), os.Getuid())), os.O_CREATE|os.O_RDWR, 0o600)
	if err == nil {
		err = syscall.Flock(int(lock.Fd()), syscall.LOCK_EX)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = lock.Close() })
	return address
}
