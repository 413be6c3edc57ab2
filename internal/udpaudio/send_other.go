//go:build !unix

package udpaudio

import "net/netip"

// outgoing is the buffer of one outgoing packet.
type outgoing struct {
	buf [maxPacket]byte
	n   int
	ctr ctr
}

func newOutgoing() *outgoing { return &outgoing{} }

// send writes o to the address. On this system it may wait while the socket's buffer is
// full; on Unix it never does.
func (t *Table) send(o *outgoing, to *endpoint) error {
	_, err := t.conn.WriteToUDPAddrPort(o.buf[:o.n], to.AddrPort)
	return err
}

const maxControl = 0

func (*Table) enableLocalAddress() error { return nil }

func localAddress([]byte) netip.Addr { return netip.Addr{} }
