package load

import (
	"net/netip"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Datagrams is a batch of packets of one length for one address, sent with one system call. It must not be copied.
type Datagrams struct {
	fd      int
	to      unix.RawSockaddrInet4
	vectors [DatagramBatch]unix.Iovec
	headers [DatagramBatch]mmsghdr
	Buffers [DatagramBatch][]byte
}

// mmsghdr is the kernel's struct mmsghdr (sendmmsg(2)).
type mmsghdr struct {
	header unix.Msghdr
	sent   uint32
	_      [4]byte
}

// NewDatagrams opens a socket whose packets of size bytes go to an IPv4 address.
func NewDatagrams(to netip.AddrPort, size int) (*Datagrams, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	port := to.Port()
	d := &Datagrams{fd: fd, to: unix.RawSockaddrInet4{Family: unix.AF_INET, Port: port>>8 | port<<8, Addr: to.Addr().As4()}}
	for i := range d.headers {
		d.Buffers[i] = make([]byte, size)
		d.vectors[i].Base = &d.Buffers[i][0]
		d.vectors[i].SetLen(size)
		d.headers[i].header = unix.Msghdr{Iov: &d.vectors[i], Iovlen: 1, Name: (*byte)(unsafe.Pointer(&d.to)), Namelen: unix.SizeofSockaddrInet4}
	}
	return d, nil
}

// Send sends the first n packets.
func (d *Datagrams) Send(n int) error {
	for done := 0; done < n; {
		k, _, errno := syscall.Syscall6(unix.SYS_SENDMMSG, uintptr(d.fd), uintptr(unsafe.Pointer(&d.headers[done])), uintptr(n-done), 0, 0, 0)
		runtime.KeepAlive(d)
		if errno != 0 && errno != unix.EINTR {
			return errno
		}
		done += int(k)
	}
	return nil
}

func (d *Datagrams) Close() error { return unix.Close(d.fd) }
