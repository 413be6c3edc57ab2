// Package load is what the bench and its baselines share: devices with the transport of the firmware that answer at once, and
// callers that speak just enough HTTP to be understood. They share two cores with the server, so everything else is left out;
// and as both sides are measured with the same load, their ratio does not depend on it.
package load

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"syscall"
	"time"
)

// PerAddress is how many clients share an address: beyond that the kernel's search for a free port takes longer than the connect.
const PerAddress = 1500

// Dial connects as client number i. Clients are spread over 127.0.0.2 and up, PerAddress each. The connection works for
// ExchangeLimit, so that a server that falls silent ends the run.
func Dial(ctx context.Context, address string, i int) (net.Conn, error) {
	return dial(ctx, address, i, lateBind)
}

// DialNarrow is Dial with the receive window and the segments of a device, so that a server waits for a device that reads slowly.
func DialNarrow(ctx context.Context, address string, i int) (net.Conn, error) {
	return dial(ctx, address, i, narrow)
}

func dial(ctx context.Context, address string, i int, control func(network, address string, c syscall.RawConn) error) (net.Conn, error) {
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, byte(2+i/PerAddress))}, Timeout: ExchangeLimit, Control: control}
	c, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return c, c.SetDeadline(time.Now().Add(ExchangeLimit))
}

// DatagramBatch is how many UDP packets leave with one system call.
const DatagramBatch = 64

// ExchangeLimit bounds the exchange on one connection until the device is ready.
const ExchangeLimit = time.Minute

// ReadResponse reads one HTTP response with a Content-Length. The body is valid until the next read.
func ReadResponse(br *bufio.Reader) (status int, body []byte, err error) {
	length := -1
	for {
		line, err := br.ReadSlice('\n')
		if err != nil {
			return 0, nil, err
		}
		if status == 0 {
			if len(line) < 12 {
				return 0, nil, fmt.Errorf("status line %q", line)
			}
			if status, err = strconv.Atoi(string(line[9:12])); err != nil {
				return 0, nil, fmt.Errorf("status line %q", line)
			}
			continue
		}
		if len(line) == 2 {
			break
		}
		if value, ok := bytes.CutPrefix(line, []byte("Content-Length: ")); ok {
			if length, err = strconv.Atoi(string(bytes.TrimSpace(value))); err != nil {
				return 0, nil, fmt.Errorf("header %q", line)
			}
		}
	}
	if length < 0 {
		return status, nil, errors.New("response without Content-Length")
	}
	body, err = br.Peek(length)
	if err == nil {
		_, err = br.Discard(length)
	}
	return status, body, err
}
