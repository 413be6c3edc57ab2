package load

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync/atomic"
	"time"
)

// Target is an HTTP server that takes calls, and how a request to it reads around the device's id.
type Target struct{ Address, Before, After string }

// CallLoad lets callers call one device after another over keep-alive connections until the time is over, and returns
// how long each call took. A call that does not succeed ends it.
func CallLoad(ctx context.Context, t Target, callers, devices int, duration time.Duration) ([]time.Duration, error) {
	var sequence atomic.Int64
	parts := make([][]time.Duration, callers)
	stop := time.Now().Add(duration)
	err := InParallel(callers, callers, func() (func(k int) error, func(), error) {
		caller, err := NewCaller(t, stop.Add(ExchangeLimit))
		if err != nil {
			return nil, nil, err
		}
		return func(k int) error {
			for time.Now().Before(stop) && ctx.Err() == nil {
				begun := time.Now()
				if err := caller.Call(int(sequence.Add(1)) % devices); err != nil {
					return err
				}
				parts[k] = append(parts[k], time.Since(begun))
			}
			return ctx.Err()
		}, caller.Close, nil
	})
	return slices.Concat(parts...), err
}

var callSuccess = []byte(`"isError":false`)

// Caller is one keep-alive connection of somebody who calls.
type Caller struct {
	Target
	conn    net.Conn
	br      *bufio.Reader
	request []byte
}

// NewCaller connects somebody whose calls must be over by the deadline.
func NewCaller(t Target, deadline time.Time) (*Caller, error) {
	c, err := net.Dial("tcp", t.Address)
	if err != nil {
		return nil, err
	}
	if err := c.SetDeadline(deadline); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return &Caller{Target: t, conn: c, br: bufio.NewReaderSize(c, 4096)}, nil
}

// Close ends the connection.
func (c *Caller) Close() { _ = c.conn.Close() } // nothing is under way

// Call calls the device's tool; whatever is not a success is an error.
func (c *Caller) Call(device int) error {
	ok, status, body, err := c.Try(DeviceID(device))
	if err != nil {
		return fmt.Errorf("call: %w", err)
	}
	if !ok {
		return fmt.Errorf("call: status %d, %.300q", status, body)
	}
	return nil
}

// Try calls the device's tool and returns the answer. An error means that there is none.
func (c *Caller) Try(device string) (ok bool, status int, body []byte, err error) {
	c.request = append(append(append(c.request[:0], c.Before...), device...), c.After...)
	if _, err := c.conn.Write(c.request); err != nil {
		return false, 0, nil, err
	}
	status, body, err = ReadResponse(c.br)
	return err == nil && status == 200 && bytes.Contains(body, callSuccess), status, body, err
}

// Quantile of sorted durations.
func Quantile(sorted []time.Duration, q float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}
