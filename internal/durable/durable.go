// Package durable writes files so that they survive a power cut: what a call
// reported as written is there afterwards, and nothing is there in part. A file
// that was written and renamed without a sync has its name on the disk long
// before its bytes, on ext4 and on XFS, and is empty after a cut.
package durable

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// syncFile is replaced in tests, which want to know what was synced.
var syncFile = (*os.File).Sync

// WriteFile replaces a file in one step, readable by its owner only.
func WriteFile(path string, content []byte) error {
	temp, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*") // mode 0600
	if err != nil {
		return err
	}
	_, err = temp.Write(content)
	if err == nil {
		err = syncFile(temp)
	}
	if err = errors.Join(err, temp.Close()); err == nil {
		err = os.Rename(temp.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(temp.Name()))
	}
	return SyncDir(filepath.Dir(path))
}

// Create makes a file that must not exist, with these bytes.
func Create(path string, mode fs.FileMode, content io.Reader) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if err != nil {
		return err
	}
	_, err = io.Copy(file, content)
	if err = errors.Join(err, file.Chmod(mode)); err == nil {
		err = syncFile(file)
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return err
	}
	return SyncDir(filepath.Dir(path))
}

// Append adds to the end of a file, which it makes if need be, readable by its
// owner only. limit bounds what the file may have before that.
func Append(path string, limit int64, content []byte) error {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	info, err := file.Stat()
	if err == nil && info.Size() > limit {
		err = fmt.Errorf("%s has more than %d bytes", path, limit)
	}
	if err == nil {
		_, err = file.Write(content)
	}
	if err == nil {
		err = syncFile(file)
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return err
	}
	return SyncDir(filepath.Dir(path))
}

// Rename gives a synced file another name, in place of what has it.
func Rename(from, to string) error {
	if err := os.Rename(from, to); err != nil {
		return err
	}
	return SyncDir(filepath.Dir(to))
}

// MkdirAll makes a directory with those above it, for their owner only.
func MkdirAll(path string) error {
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return nil
	}
	parent := filepath.Dir(path)
	if parent != path {
		if err := MkdirAll(parent); err != nil {
			return err
		}
	}
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return SyncDir(parent)
}

// SyncDir makes what was created, renamed and removed in a directory survive.
func SyncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(syncFile(dir), dir.Close())
}
