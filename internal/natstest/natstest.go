// Package natstest runs real NATS servers in the processes of tests and benches.
package natstest

import (
	"errors"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// startTime is how long a server may take until it accepts connections.
const startTime = 30 * time.Second

// Run starts a server on 127.0.0.1; port 0 chooses a free port. Stop ends it.
func Run(o server.Options) (*server.Server, error) {
	o.Host, o.NoLog, o.NoSigs = "127.0.0.1", true, true
	if o.Port == 0 {
		o.Port = server.RANDOM_PORT
	}
	s, err := server.NewServer(&o)
	if err != nil {
		return nil, err
	}
	s.Start()
	if !s.ReadyForConnections(startTime) {
		Stop(s)
		return nil, errors.New("the NATS server does not start")
	}
	return s, nil
}

// Start runs a server until the test ends.
func Start(t testing.TB, o server.Options) *server.Server {
	t.Helper()
	s, err := Run(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { Stop(s) })
	return s
}

// Stop ends a server and waits until it has ended.
func Stop(s *server.Server) {
	s.Shutdown()
	s.WaitForShutdown()
}
