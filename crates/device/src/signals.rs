//! What the system would end a process for, and need not.

/// From now on writing beyond the largest file that the process may have (`ulimit -f`) is an error of that
/// write, as on a full disk, and not the end of the process. For the whole process, and for what it starts.
pub fn let_large_files_fail() {
    // SAFETY: no handler is installed: the signal, which is sent for such a write alone, is ignored, and the
    // write then answers EFBIG.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_signal_is_ignored() {
        super::let_large_files_fail();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
        let ignored = u64::from_str_radix(ignored.trim(), 16).unwrap();
        assert!(ignored & (1 << (libc::SIGXFSZ - 1)) != 0, "{ignored:x}");
    }
}
