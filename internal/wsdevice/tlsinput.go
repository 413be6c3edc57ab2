package wsdevice

import (
	"bytes"
	"crypto/tls"
	"net"
	"reflect"
	"unsafe"
)

// crypto/tls reads a record whole into a buffer which it keeps as long as the
// connection lives: 8 KB and more once a page of tools has come, for every idle device. Nothing
// in its interface gives that back, so it is taken from where it is. Where the fields
// are not what they were in Go 1.26 nothing is done, which a test reports.
var tlsRaw, tlsInput = offset[bytes.Buffer]("rawInput"), offset[bytes.Reader]("input")

// keepInput is what an idle TLS connection may keep, in bytes: a record header and what
// is read with it.
const keepInput = 1 << 10

// offset is where a field of tls.Conn is; zero, which is none of these, if there is none
// of that type.
func offset[T any](name string) uintptr {
	f, ok := reflect.TypeFor[tls.Conn]().FieldByName(name)
	if !ok || f.Type != reflect.TypeFor[T]() {
		return 0
	}
	return f.Offset
}

// releaseInput gives back what a TLS connection keeps of records that have been read to
// their ends. Only the goroutine that reads from it may call this, between reads.
func releaseInput(conn net.Conn) {
	if w, ok := conn.(*watched); ok {
		conn = w.Conn
	}
	c, secure := conn.(*tls.Conn)
	if !secure || tlsRaw == 0 || tlsInput == 0 {
		return
	}
	raw := (*bytes.Buffer)(unsafe.Add(unsafe.Pointer(c), tlsRaw))
	input := (*bytes.Reader)(unsafe.Add(unsafe.Pointer(c), tlsInput))
	if raw.Len() == 0 && input.Len() == 0 && raw.Cap() > keepInput {
		*raw, *input = bytes.Buffer{}, bytes.Reader{} // input points into what raw had
	}
}
