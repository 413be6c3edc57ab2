package lobby

import (
	"container/list"
	"net"
	"net/netip"
	"sync"
)

// hostsLooked is among how many addresses the one with the most silent connections is
// looked for: all of a few, and some of so many that each has few.
const hostsLooked = 64

// Silent is connections that have not yet said what they come for, by address. When
// there are too many, those of the address with the most of them give way. The zero
// value is ready; it is safe for concurrent use.
type Silent struct {
	mu    sync.Mutex
	hosts map[netip.Addr]*list.List // of net.Conn, oldest first
}

// Waiting is a connection's place among the silent ones.
type Waiting struct {
	host netip.Addr
	at   *list.Element
}

// Add takes a connection in, until Remove.
func (s *Silent) Add(c net.Conn) (w Waiting) {
	s.put(c, &w)
	return w
}

// put is Add for a place that the connection itself keeps: it may have to give way, and
// be removed, before put returns.
func (s *Silent) put(c net.Conn, w *Waiting) {
	host := netip.Addr{}
	if peer, err := netip.ParseAddrPort(c.RemoteAddr().String()); err == nil {
		host = HostOf(peer.Addr())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hosts == nil {
		s.hosts = map[netip.Addr]*list.List{}
	}
	if s.hosts[host] == nil {
		s.hosts[host] = list.New()
	}
	*w = Waiting{host, s.hosts[host].PushBack(c)}
}

// take is Remove for a place of put.
func (s *Silent) take(w *Waiting) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w.at != nil {
		s.removeLocked(*w)
	}
}

// Remove takes a connection out that has spoken, or ended. It may have given way.
func (s *Silent) Remove(w Waiting) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.removeLocked(w)
}

func (s *Silent) removeLocked(w Waiting) {
	if of := s.hosts[w.host]; of != nil {
		of.Remove(w.at)
		if of.Len() == 0 {
			delete(s.hosts, w.host)
		}
	}
}

// GiveWay closes the oldest connection of the address with the most, unless none is
// silent.
func (s *Silent) GiveWay() bool {
	s.mu.Lock()
	most := Waiting{}
	longest, looked := 0, 0
	for host, of := range s.hosts {
		if of.Len() > longest {
			most, longest = Waiting{host, of.Front()}, of.Len()
		}
		if looked++; looked == hostsLooked {
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
	_ = conn.Close() // its reader ends
	return true
}
