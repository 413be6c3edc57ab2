//go:build !linux

package load

import (
	"errors"
	"net/netip"
)

type Datagrams struct{ Buffers [DatagramBatch][]byte }

func NewDatagrams(netip.AddrPort, int) (*Datagrams, error) {
	return nil, errors.New("measuring UDP needs Linux")
}

func (*Datagrams) Send(int) error { return nil }

func (*Datagrams) Close() error { return nil }
