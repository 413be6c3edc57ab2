package connlimit

import (
	"container/list"
	"net"
	"net/netip"
	"sync"
)

// hostsCompared is how many addresses CloseOldest compares: with few addresses all of them,
// and with more a part, since each then has few connections.
const hostsCompared = 64

// SilentConns contains connections, by address, that have not yet sent what
// identifies them. CloseOldest makes room when there are too many. The zero value is ready
// to use. It is safe for concurrent use.
type SilentConns struct {
	mu    sync.Mutex
	hosts map[netip.Addr]*list.List // of net.Conn, oldest first
}

// SilentEntry is the entry of a connection in SilentConns.
type SilentEntry struct {
	host netip.Addr
	at   *list.Element
}

// Add adds a connection, until Remove. Another goroutine may close the connection, and remove the entry, before Add returns.
func (s *SilentConns) Add(c net.Conn, w *SilentEntry) {
	host := netip.Addr{}
	if peer, err := netip.ParseAddrPort(c.RemoteAddr().String()); err == nil {
		host = AddressKey(peer.Addr())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hosts == nil {
		s.hosts = map[netip.Addr]*list.List{}
	}
	if s.hosts[host] == nil {
		s.hosts[host] = list.New()
	}
	*w = SilentEntry{host, s.hosts[host].PushBack(c)}
}

// Remove removes a connection that has identified itself or ended. CloseOldest may have
// removed it before.
func (s *SilentConns) Remove(w *SilentEntry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w.at != nil {
		s.removeLocked(*w)
	}
}

func (s *SilentConns) removeLocked(w SilentEntry) {
	if of := s.hosts[w.host]; of != nil {
		of.Remove(w.at)
		if of.Len() == 0 {
			delete(s.hosts, w.host)
		}
	}
}

// CloseOldest closes the oldest connection of the address that has the most. It returns
// false if there is none.
func (s *SilentConns) CloseOldest() bool {
	s.mu.Lock()
	most := SilentEntry{}
	longest, compared := 0, 0
	for host, of := range s.hosts {
		if of.Len() > longest {
			most, longest = SilentEntry{host, of.Front()}, of.Len()
		}
		if compared++; compared == hostsCompared {
			break
		}
	}
	if longest == 0 {
		s.mu.Unlock()
		return false
	}
	conn := most.at.Value.(net.Conn)
	s.removeLocked(most)
	s.mu.Unlock()
	_ = conn.Close() // its reader then ends
	return true
}
