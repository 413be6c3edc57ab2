//go:build !unix

package udpaudio

import "net/netip"

// outgoing is the scratch space of one packet on its way out.
type outgoing struct {
	buf [maxPacket]byte
	n   int
	ctr ctr
}

func newOutgoing() *outgoing { return &outgoing{} }

// send writes o to the address. Here it may wait while the socket's buffer is
// full; on Unix it never does.
func (t *Table) send(o *outgoing, to *endpoint) error {
	_, err := t.conn.WriteToUDPAddrPort(o.buf[:o.n], to.AddrPort)
	return err
}

const maxControl = 0

func (*Table) askLocal() error { return nil }

func localOf([]byte) netip.Addr { return netip.Addr{} }
